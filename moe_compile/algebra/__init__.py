"""The algebra of recognition: terms say what a tensor's element is, layouts say where it sits."""
