"""From settings to a running engine: devices, memory, drafters, calibration, observers; and how one is asked."""
