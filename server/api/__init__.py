"""The APIs, a folder for each; none imports another. A module with ``ROUTES`` is what :mod:`foresay.server.http.app`
serves."""
