"""Our receiver inside engines that others wrote; one package for each, which alone imports that engine."""
