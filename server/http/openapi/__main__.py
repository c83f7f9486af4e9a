"""``python -m server.http.openapi``: print the document."""

from __future__ import annotations

import sys

from server.http.app import DOORS
from server.http.openapi.document import encoded

if __name__ == "__main__":
    sys.stdout.buffer.write(encoded(DOORS))
