"""What a run is saved as and goes on from, whatever its strategy and layout."""
