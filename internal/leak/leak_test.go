package leak

import (
	"encoding/base64"
	"fmt"
	"testing"
)

func TestShows(t *testing.T) {
	for from := range 4 {
		padded := "xyz"[:min(from, 3)] + Key + "more"
		for name, text := range map[string]string{
			"as it is":  padded,
			"bytes":     fmt.Sprint([]byte(padded)),
			"base64":    "1" + base64.RawURLEncoding.EncodeToString([]byte(padded)) + " and",
			"twice":     base64.StdEncoding.EncodeToString([]byte(`{"r":"1` + base64.RawURLEncoding.EncodeToString([]byte(padded)) + `"}`)),
			"in quotes": `"` + base64.StdEncoding.EncodeToString([]byte(padded)) + `"`,
		} {
			if !shows(text, Key) {
				t.Errorf("%s: %s", name, text)
			}
		}
	}
	for _, text := range []string{"", "sk-live", Key[1:], base64.StdEncoding.EncodeToString([]byte(Key[1:]))} {
		if shows(text, Key) {
			t.Errorf("shown in %s", text)
		}
	}
}
