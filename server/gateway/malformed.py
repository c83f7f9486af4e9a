"""What is logged of requests that are no proper HTTP: that they came, and from where.

aiohttp logs a traceback with the offending line, which may be the one that holds the key; and whoever scans a network
would fill the log.
"""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger("foresay.http")


class _Shortened(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg = f"a malformed request from %s ({type(error).__name__})"
            record.exc_info, record.exc_text = None, None
        return True


log.addFilter(_Shortened())
