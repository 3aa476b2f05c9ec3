"""Real models on real data, for `class_path: examples.digits.DigitsModule` in a config."""
