"""`deepspeed.runtime`: where scripts look for names that lie elsewhere here."""
