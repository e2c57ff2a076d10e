"""Several training processes as one."""
