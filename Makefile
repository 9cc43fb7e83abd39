# The commands of README.md. Everything they do is in tools/ and corpus/.

.PHONY: build demo check test soak corpus install install-built uninstall static deb clean

build:
	tools/setup build
	cargo build --release
	tools/guest

# Two real versions of a real image, with and without sharing. OLD= and NEW= name other images.
demo:
	tools/demo $(OLD) $(NEW)

# The inner loop: format, lints, unit tests and those of the store.
check:
	tools/check

# Everything. STRICT=1 excuses no skip that `tools/setup` could have seen to.
test:
	tools/test

# Hours of what `make test` does for seconds; results are archived under bench/runs/.
soak:
	tools/soak

# All six image pairs, as OCI layouts under corpus/out/.
corpus:
	corpus/build --all

# PREFIX says where, DESTDIR below which directory (for packages). BINARY is what gets installed.
PREFIX ?= /usr/local
BINARY ?= target/release/cofolio
# What virtual machines need: `tools/guest` builds it.
VM_FILES ?= target/lib/cofolio
bin = $(DESTDIR)$(PREFIX)/bin
share = $(DESTDIR)$(PREFIX)/share
install: build install-built

install-built:
	install -D -m 755 $(BINARY) $(bin)/cofolio
	install -D -m 755 $(VM_FILES)/cofolio-guest $(DESTDIR)$(PREFIX)/lib/cofolio/cofolio-guest
	install -m 644 $(VM_FILES)/libcofolio_shim.so $(DESTDIR)$(PREFIX)/lib/cofolio/libcofolio_shim.so
	$(BINARY) man --quiet $(share)/man/man1
	install -d $(share)/bash-completion/completions $(share)/zsh/site-functions $(share)/fish/vendor_completions.d
	$(BINARY) completions bash >$(share)/bash-completion/completions/cofolio
	$(BINARY) completions zsh >$(share)/zsh/site-functions/_cofolio
	$(BINARY) completions fish >$(share)/fish/vendor_completions.d/cofolio.fish
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's,/usr/bin/,$(PREFIX)/bin/,' packaging/systemd/cofolio.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/cofolio.service
	install -m 644 packaging/systemd/cofolio.socket $(DESTDIR)$(PREFIX)/lib/systemd/system/cofolio.socket
	install -D -m 644 -t $(share)/doc/cofolio docs/config.toml LICENSE-APACHE LICENSE-MIT
	packaging/bill sbom >$(share)/doc/cofolio/cofolio.spdx.json
	packaging/bill notices >$(share)/doc/cofolio/THIRD-PARTY

# Images, settings and mounts stay.
uninstall:
	rm -f $(bin)/cofolio $(share)/man/man1/cofolio.1 $(share)/man/man1/cofolio-*.1
	rm -f $(share)/bash-completion/completions/cofolio $(share)/zsh/site-functions/_cofolio
	rm -f $(share)/fish/vendor_completions.d/cofolio.fish
	rm -f $(DESTDIR)$(PREFIX)/lib/systemd/system/cofolio.service $(DESTDIR)$(PREFIX)/lib/systemd/system/cofolio.socket
	rm -rf $(share)/doc/cofolio $(DESTDIR)$(PREFIX)/lib/cofolio

# One program without libraries, for x86-64: target/x86_64-unknown-linux-musl/release/cofolio.
static:
	tools/setup static
	cargo build --locked --release -p cofolio --target x86_64-unknown-linux-musl
	tools/guest x86_64-unknown-linux-musl

# A Debian package, in target/deb.
deb: build
	tools/setup package
	packaging/deb

clean:
	cargo clean
