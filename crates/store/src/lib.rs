//! The content-addressed store: objects, images, refs, garbage collection, fsck, crash safety.
