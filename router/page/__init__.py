"""A look inside with a browser: plain files, and the two streams of data behind them."""
