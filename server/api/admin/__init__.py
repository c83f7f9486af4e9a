"""What only who runs the server may ask: with the admin key."""
