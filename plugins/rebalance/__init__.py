"""ReBalance: the model's own confidence, step by step, sets the strength and sign of a steering vector.

So far the control function alone; the plugin follows with the residual hooks that it needs on both hosts.
"""
