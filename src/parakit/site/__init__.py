"""The documentation site, the planner that runs in a browser, and the drawings of strategies.

This package decides which pages the site has and what a page loads. It computes nothing that the planner does
not compute.
"""
