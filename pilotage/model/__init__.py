"""Import paths of the vLLM Neuron documentation that do not fit this layout; nothing else lives here."""
