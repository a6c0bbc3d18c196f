"""What is said of measured runs: one module for each kind of comparison, all from `Measured`."""
