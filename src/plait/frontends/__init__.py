"""Other frameworks' words, translated into a run description and run by Plait's own engine."""
