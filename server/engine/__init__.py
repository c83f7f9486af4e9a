"""From settings to a running engine: devices, memory, drafters, calibration, observers; and the engine's interface."""
