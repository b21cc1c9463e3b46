"""Several phases one after another, each beginning with what the one before has made."""
