"""Tools around runs: import, export, compare, forecast, serve, sweep. The core never imports from here."""
