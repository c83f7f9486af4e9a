"""The application: routes of all APIs, authentication, the access log, and its OpenAPI document."""
