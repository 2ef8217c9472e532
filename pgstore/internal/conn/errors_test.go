package conn

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func serverError(code, message string) error {
	return fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: code, Message: message, SeverityUnlocalized: "ERROR"})
}

// Only what values can cause is looked for in each half of a batch.
func TestOfValues(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{
		"22003": true,  // numeric_value_out_of_range
		"23514": true,  // check_violation
		"44000": true,  // with_check_option_violation
		"54000": true,  // program_limit_exceeded, such as of an index row
		"P0001": true,  // raise_exception
		"25006": false, // read_only_sql_transaction
		"25P03": false, // idle_in_transaction_session_timeout
		"0A000": false, // feature_not_supported
		"54001": false, // statement_too_complex
		"58030": false, // io_error
		"XX001": false, // data_corrupted
		"40001": false, "40P01": false, "42501": false, "53100": false, "55P03": false, "57014": false, "08P01": false, "": false,
	} {
		if got := OfValues(serverError(code, "")); got != want {
			t.Errorf("%q: got %v, want %v", code, got, want)
		}
	}
	if OfValues(&pgconn.PgError{Code: "22003", SeverityUnlocalized: "FATAL"}) || OfValues(errors.New("lost")) {
		t.Error("an error that is no answer is of values")
	}
}

// A lock_timeout is one also when it comes as a request that nobody has made, and a
// statement_timeout is none.
func TestTimedOut(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		code, message string
		want          bool
	}{
		{"55P03", "canceling statement due to lock timeout", true},
		{"57014", "canceling statement due to user request", true},
		{"57014", "canceling statement due to statement timeout", false},
		{"57P01", "terminating connection due to administrator command", false},
	} {
		if got := TimedOut(serverError(test.code, test.message)); got != test.want {
			t.Errorf("%s %q: got %v, want %v", test.code, test.message, got, test.want)
		}
	}
}

// What a pooler makes of statements that are prepared, in each of its forms, is an error that says what
// to set. A pooler without a server has the same code, and no such hint.
func TestPoolerIsExplained(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		code, message string
		hint          bool
	}{
		{"42P05", "", true},
		{"26000", "", true},
		{"08P01", `bind message supplies 2 parameters, but prepared statement "stmtcache_1" requires 3`, true},
		{"08P01", "prepared statement name is already in use", true},
		{"08P01", "server login has been failing, try again later (server_login_retry)", false},
		{"08P01", "server conn crashed?", false},
	} {
		err := new(Conn).Fault("take", serverError(test.code, test.message))
		if strings.Contains(err.Error(), "default_query_exec_mode=exec") != test.hint || Code(err) != test.code {
			t.Errorf("%s %q: got %v, want a hint %v", test.code, test.message, err, test.hint)
		}
	}
}
