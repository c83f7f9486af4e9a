"""Routes for the server's operator: they need the admin key."""
