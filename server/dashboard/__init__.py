"""The page that shows what speculation does: static files (``static/``, plain ES modules) and the feed behind them."""
