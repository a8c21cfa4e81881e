"""Day zero: a model of transformers that has no package here is served on Hugging Face's own modules.

Its attention goes through transformers' attention interface, so it can be led to our paged cache. What the model wants
of the cache is learnt from one forward (`layers`), what it computes is proven against its own forward before anything
is served (`check`), and whatever does not fit is refused with the reason. Slow but right: nothing is compiled.
"""
