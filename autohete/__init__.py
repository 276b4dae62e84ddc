"""AutoHete: what should stay on the GPU, what should move to the host, in which order, and how fast will that train?"""
