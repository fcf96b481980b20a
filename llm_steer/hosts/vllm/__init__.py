"""vLLM host: carries plugins into stock vLLM (>= 0.31), on the V1 model runner and on Model Runner V2.

Which process does what:

* front end (``LLM``, API servers): :mod:`admission` validates and resolves a request's parameters, :mod:`trace` replays
  what was done, :mod:`server` adds it to HTTP responses;
* engine core: :mod:`admission` turns away requests that did not come through the front end;
* worker: :mod:`logits` and :mod:`runner` call the plugins.

:mod:`plugin` is the entry point that vLLM loads in each of them; :mod:`compat` keeps the list of what is hooked into.
"""
