"""Image sets: CIFAR-10 and synthetic images, and a loader that keeps all images on the training device."""
