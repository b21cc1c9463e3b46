"""What engines of other libraries have in common: a whole model goes in, a logical state comes out."""
