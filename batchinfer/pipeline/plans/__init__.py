"""Plans that follow the first plan of a run: for rows that are still being read, and for further attempts."""
