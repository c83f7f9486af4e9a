"""The OpenAPI document; ``python -m server.http.openapi`` prints it."""
