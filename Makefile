# The commands of README.md. Everything they do is in tools/ and corpus/.

.PHONY: build demo test soak corpus install clean

build:
	tools/setup build
	cargo build --release

# Two real versions of a real image, with and without sharing. OLD= and NEW= name other images.
demo:
	tools/demo $(OLD) $(NEW)

test:
	tools/test

# Hours of what `make test` does for seconds; results are archived under bench/runs/.
soak:
	tools/soak

# All six image pairs, as OCI layouts under corpus/out/.
corpus:
	corpus/build --all

PREFIX ?= /usr/local
install: build
	install -D -m 755 target/release/cofolio $(DESTDIR)$(PREFIX)/bin/cofolio
	target/release/cofolio man --quiet $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions \
	    $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	target/release/cofolio completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/cofolio
	target/release/cofolio completions zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_cofolio
	target/release/cofolio completions fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/cofolio.fish

clean:
	cargo clean
