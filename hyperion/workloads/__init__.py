"""Models, data sets, training recipes, scores and ONNX sessions that the experiments of several subjects share."""
