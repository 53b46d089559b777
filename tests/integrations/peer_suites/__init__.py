"""The parametrisations of other libraries' own attention tests: their values as data, and the call
of flashsmith that a case is."""
