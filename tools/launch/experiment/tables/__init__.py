"""What is said of measured runs: one module for each kind of comparison, over the report's rows."""
