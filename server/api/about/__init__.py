"""What the server says about itself: models, health, metrics, and the page with its feed (``static/``, ES modules)."""
