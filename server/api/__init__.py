"""The APIs, a folder for each; none imports another. :mod:`foresay.server.http.app` serves the modules with
``ROUTES``."""
