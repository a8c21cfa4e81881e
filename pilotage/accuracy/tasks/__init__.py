"""Level 1: tasks of lm-eval on the served model and on Hugging Face's, item by item."""
