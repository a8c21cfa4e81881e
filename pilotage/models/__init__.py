"""Model definitions, one package per architecture, and the table that finds them."""
