package visible_test

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// hostile are texts that do harm where they are printed as they are.
var hostile = []string{
	"", " ", "\x1b[2J\x1b]0;pwned\a", "a\nb", "a\rb", "a\tb", "\u202egnp.exe", "\u2066a\u2069", "\u0085", "\u009b31m",
	"\u200b", "\ufeff", "\u2028", "a\x7fb", "\xff\xfe", "=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "'a", `"a"`, `a"b`, `\`,
	"<script>alert(1)</script>", strings.Repeat("k", 2048), "\U000e0001", "plain", "user 7:alice", "ключ", "鍵", "\U0001f600",
}

func TestTextHidesNothing(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, s := range hostile {
		shown := visible.Text(s)
		if before, twice := seen[shown]; twice {
			t.Errorf("%q and %q are both shown as %s", before, s, shown)
		}
		seen[shown] = s
		wantPrinted(t, shown, "")
		if shown == "" || strings.ContainsRune("=+-@'", rune(shown[0])) {
			t.Errorf("%q is shown as %q, which a spreadsheet takes for a formula", s, shown)
		}
		if back, err := visible.Parse(shown); err != nil || back != s {
			t.Errorf("%q is shown as %s and read back as %q, %v", s, shown, back, err)
		}
		wantPrinted(t, visible.Lines(s), "\n\t")
	}
	for _, s := range []string{"plain", "user 7:alice", "ключ", "鍵", "\U0001f600", "<b>", `a"b`, `\`} {
		if got := visible.Text(s); got != s {
			t.Errorf("%q is shown as %q, want it as it is", s, got)
		}
	}
	for _, s := range []string{`"`, `"a`, `"a"b`} {
		if got, err := visible.Parse(s); err == nil {
			t.Errorf("%s is read as %q, want an error", s, got)
		}
	}
	if got := visible.Short(strings.Repeat("k", 2048), 10); got != "kkkkkkkkk…" {
		t.Errorf("cut short: %q", got)
	}
}

func wantPrinted(t *testing.T, text, besides string) {
	t.Helper()
	for _, r := range text {
		if !strconv.IsPrint(r) && !strings.ContainsRune(besides, r) || r == unicode.ReplacementChar {
			t.Errorf("%q has %q in it", text, r)
		}
	}
}

func TestJSONMeansTheSame(t *testing.T) {
	t.Parallel()
	for _, s := range hostile {
		s = strings.ToValidUTF8(s, "?")
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		shown := visible.JSON(text)
		wantPrinted(t, shown, "")
		var back string
		if err := json.Unmarshal([]byte(shown), &back); err != nil || back != s {
			t.Errorf("%q is written as %s and read back as %q, %v", s, shown, back, err)
		}
	}
}

func TestShell(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{"limits": "limits", "": "''", "my limits; ls": "'my limits; ls'", "o'brien": `'o'\''brien'`, "$x": "'$x'", "a\nb": "'a\nb'"} {
		if got := visible.Shell(s); got != want {
			t.Errorf("Shell(%q): got %s, want %s", s, got, want)
		}
	}
}
