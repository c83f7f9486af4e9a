"""The endpoints, one module for each API. Each exports ``ROUTES``."""
