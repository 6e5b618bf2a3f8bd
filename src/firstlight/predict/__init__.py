"""What a step takes on hardware that need not be here: the model's own ops, walked on shapes, priced by a model of the GPU."""
