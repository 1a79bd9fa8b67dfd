"""What runs on the GPU. Importing these needs Triton."""
