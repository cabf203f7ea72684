"""Reports: everything here is computed from rows alone."""
