"""The specification of a model: its layers, and the shapes, names and costs that follow from them."""
