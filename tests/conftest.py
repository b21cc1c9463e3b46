"""Lets every test import `tests` as a package, from whichever folder pytest was given."""
