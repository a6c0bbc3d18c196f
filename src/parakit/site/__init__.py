"""Build the documentation site, the planner that runs in a browser, and the drawings of strategies.

This package decides which pages the site has, and which files a page loads. All figures are computed by the
planner.
"""
