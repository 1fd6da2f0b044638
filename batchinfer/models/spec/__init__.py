"""What a model is: its layers, and the shapes, names and costs that follow from them."""
