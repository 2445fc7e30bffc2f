"""Image sets: CIFAR-10, synthetic images, device-resident images."""
