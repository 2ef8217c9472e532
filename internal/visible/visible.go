// Package visible shows texts that strangers have chosen, such as keys, so that they do no
// harm to a terminal, a spreadsheet or a reader: what is not printed, such as an escape
// sequence or a character that turns the direction of writing, is shown escaped.
package visible

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Text returns s as it is if nothing in it is hidden, and otherwise in Go's double quotes. It is
// quoted too if it is empty, begins or ends with a space, or begins with what a spreadsheet takes
// for a formula or [Parse] for a quote. So different texts never look alike by their bytes, and
// Parse reads each of them back.
func Text(s string) string {
	if s == "" || strings.TrimSpace(s) != s || strings.ContainsRune(`"'=+-@`, rune(s[0])) {
		return strconv.Quote(s)
	}
	for _, r := range s {
		if r == utf8.RuneError || !strconv.IsPrint(r) {
			return strconv.Quote(s)
		}
	}
	return s
}

var plain = regexp.MustCompile(`^[\w./:,@%+-]+$`)

// Shell returns s as one word for a shell.
func Shell(s string) string {
	if plain.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// Parse reads what [Text] has written: a text that begins with a double quote is one in Go's
// quotes, and any other is itself.
func Parse(s string) (string, error) {
	if !strings.HasPrefix(s, `"`) {
		return s, nil
	}
	text, err := strconv.Unquote(s)
	if err != nil {
		return "", fmt.Errorf("%s begins with a quote, and is no quoted text: write %s for one with quotes in it", Lines(s), strconv.Quote(s))
	}
	return text, nil
}

// Short returns [Text] cut to a number of characters, with "…" at its end if it was cut.
func Short(s string, most int) string {
	text := []rune(Text(s))
	if len(text) <= most {
		return string(text)
	}
	return string(text[:most-1]) + "…"
}

// Lines returns s with all that is not printed escaped, but for the ends of lines and tabs: for
// messages.
func Lines(s string) string {
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD"):
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case strconv.IsPrint(r) || r == '\n' || r == '\t':
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// JSON returns JSON in which texts have no character that is not printed: encoding/json leaves
// some as they are. It means the same.
func JSON(text []byte) string {
	var b strings.Builder
	for _, r := range string(text) {
		switch {
		case r == '\n' || r < utf8.RuneSelf && r != 0x7f || strconv.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Amount writes a number of tokens for people, rounded down to a thousandth, so that what it shows
// exists.
func Amount(v float64) string {
	if math.IsInf(v, 0) {
		return "unlimited"
	}
	return strconv.FormatFloat(math.Floor(v*1000+1e-6)/1000, 'f', -1, 64)
}

// Period writes a duration exactly, as Go does, without trailing units of 0.
func Period(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
