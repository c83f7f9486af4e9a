"""The OpenAPI document; ``python -m foresay.server.http.openapi`` prints it."""
