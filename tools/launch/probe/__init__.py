"""What `make doctor` measures with torch and NVML: how fast devices exchange, and what slows them."""
