"""Models of three libraries from tiny configurations: transformers, timm and torchvision.

In: what is installed. Out: a `Subject` for each architecture.
Never found here: a trial, or anything of autopipe's results.
"""
