"""``python -m foresay.server.http.openapi``: print the document."""

from __future__ import annotations

import sys

from foresay.server.http.app import ROUTE_MODULES
from foresay.server.http.openapi.routes import encoded

if __name__ == "__main__":
    sys.stdout.buffer.write(encoded(ROUTE_MODULES))
